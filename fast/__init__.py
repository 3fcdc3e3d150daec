"""The core's numbers, sooner or in less memory. A test holds each function to the plain one."""
