"""Talking to tablet servers: transport, routing, writers, lookups, log reads, subscriptions."""
