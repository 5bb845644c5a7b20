"""Pages and figures of finished runs: report, comparison, replay."""
