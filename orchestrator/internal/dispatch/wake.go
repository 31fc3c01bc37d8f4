package dispatch

// Wake has a group look for what there is to do: by its run, or by a new one if
// there is none and something is.
func (d *Dispatcher) Wake(folder string) { d.queue.Add(folder) }
