"""The core's numbers, faster or in less memory. A test compares each function to the plain one."""
