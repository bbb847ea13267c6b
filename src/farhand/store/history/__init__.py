"""Read and prune the history: timelines, verification of seals, retention."""
