"""`python -m farhand` is the command `farhand`."""

from farhand.cli.main import main

main()
