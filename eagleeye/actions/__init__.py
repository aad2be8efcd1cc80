"""From an incident to a plan and its outcome: policy (pure), the backend seam, the journal."""
