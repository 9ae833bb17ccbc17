"""What the connectors of all engines share. Knows no engine."""
