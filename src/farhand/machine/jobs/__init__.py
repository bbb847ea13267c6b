"""Commands held by a keeper process, so that they outlive the program that started them."""
