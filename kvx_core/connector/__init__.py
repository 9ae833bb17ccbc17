"""The code that the connectors of all engines share. It depends on no engine."""
