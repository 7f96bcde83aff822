"""Pictures of results, for the bench extra: matplotlib is imported when one is drawn."""
