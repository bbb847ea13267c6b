"""Everything that can be done to one computer: files, search, patches, jobs, sandboxes."""
