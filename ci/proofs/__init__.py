"""What the long proofs of serving share: requests, the clients that ask them, the judgement."""
