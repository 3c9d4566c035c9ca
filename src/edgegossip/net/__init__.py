"""Real machines: transport, checks on what arrives, membership, monitor, security, host."""
