"""Search in the notes of agents: chunks, keyword and vector index."""
