"""The gateway's services, in sub-packages; none of them knows HTTP."""
