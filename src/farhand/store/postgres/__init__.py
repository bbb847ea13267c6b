"""The store on PostgreSQL, which several gateways can share. Needs the extra `farhand[fleet]`."""
