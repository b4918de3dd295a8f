"""The shell around the pure cores: threads, the metadata store, tablets, the Flight endpoint."""
