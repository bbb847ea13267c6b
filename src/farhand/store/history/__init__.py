"""Reading and pruning what was recorded: timelines, verification of seals, retention."""
