    one
    two
