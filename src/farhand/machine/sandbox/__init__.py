"""Confining commands: by bubblewrap or Landlock, with networks, limits and trials; and commands on the host."""
