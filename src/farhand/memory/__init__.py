"""What the agent wrote down for itself, found again: chunks of Markdown, a keyword index, vectors, search."""
