"""What connectors of all engines share; knows no engine."""
