"""Dense sides: elements as they came."""
