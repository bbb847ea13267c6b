"""Object stores: the contract, a folder, and S3."""
