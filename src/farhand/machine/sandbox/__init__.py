"""Running commands under bubblewrap, and the host commands a sandbox may call."""
