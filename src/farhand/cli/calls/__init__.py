"""Commands about calls, jobs, approvals and the journal."""
