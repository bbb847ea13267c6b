"""File transfers between nodes and the workspace."""
