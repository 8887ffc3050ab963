"""What everything else speaks: errors, settings, requests and their outputs."""
