"""Approvals, fan-out, freeze, undo, previews and policy review."""
