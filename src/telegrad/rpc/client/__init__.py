"""How a request travels from this worker: links to other workers, what waits for a reply, who reads replies."""
