"""Questions asked of the model by measurement: one file a question."""
