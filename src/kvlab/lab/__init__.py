"""What makes a notebook evidence: records, provenance, claims, runner, figures."""
