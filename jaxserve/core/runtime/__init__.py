"""The boundary between host and device: `StepPlan`s in, token ids out."""
