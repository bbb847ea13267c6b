"""Sessions and runs of agents, their tools, replay and forks."""
