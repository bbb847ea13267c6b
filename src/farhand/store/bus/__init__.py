"""Bus implementations: live messages between gateways."""
