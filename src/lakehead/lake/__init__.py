"""The lake: what lake tables promise, marks, and reads over lake and log. Knows no lake format."""
