"""Many workers behind one address: gateways queue jobs on NATS JetStream, workers take them."""
