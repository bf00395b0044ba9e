"""Looking inside."""
