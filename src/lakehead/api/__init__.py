"""What users hold: connections, tables, scans, writers, subscriptions."""
