"""`python -m farhand` is the command `farhand`."""

from farhand.cli import main

main()
