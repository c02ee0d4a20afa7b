"""What the tests of several folders share: servers, scenarios, waits, samples, and what the tests cost."""
