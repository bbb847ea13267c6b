"""What is used: tokens and cost of runs, and budgets."""
