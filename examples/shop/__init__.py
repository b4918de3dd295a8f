"""A shop's clickstream through bronze, silver and gold on one Spark, with alerts and a live page; see the README."""
