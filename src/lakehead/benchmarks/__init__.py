"""The published figures, measured on the machine at hand."""
