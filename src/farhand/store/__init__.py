"""What is kept: the journal and the tables. It keeps and finds, it never chooses."""
