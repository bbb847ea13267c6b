"""The program `farhand node`: connects a machine to a gateway and offers its tools."""
