"""What is used and answered for: tokens and cost of runs, budgets, receipts."""
