"""HTTP plumbing shared by all routes: guard, limits, router, OpenAPI, streams."""
