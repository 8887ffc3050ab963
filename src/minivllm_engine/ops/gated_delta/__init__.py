"""The gated delta rule: chunked for prefill, one step for decode."""
