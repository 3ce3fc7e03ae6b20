"""The draft-head lab: outputs, draft vocabularies, captured hidden states, training and judging of drafters."""
