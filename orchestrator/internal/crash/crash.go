// Package crash names the points at which make crash kills the daemon. In any
// other build its function does nothing and costs nothing.
package crash

// The points, in the order in which a message, and then a task, comes by.
const (
	Stored    = "stored"     // a message is stored, its sender does not know yet
	BeforeAck = "before-ack" // its group is woken, its sender does not know yet
	Claimed   = "claimed"    // a run was given the message, no container or file of it exists
	Created   = "created"    // the container exists and has not started
	Started   = "started"    // it runs and has read nothing
	Prompted  = "prompted"   // it has its prompt
	Input     = "input"      // an input file lies in its folder
	Printed   = "printed"    // a result has arrived and is not committed
	Consumed  = "consumed"   // a batch's ack is committed
	Committed = "committed"  // a result is committed, its file is still there
	Requested = "requested"  // a request's text is in the outbox, its file is still there
	TurnEnded = "turn-ended" // the cursor has moved
	Sent      = "sent"       // the channel took a text, the store does not know
	Exited    = "exited"     // the container is gone, the run is not settled
	Adopted   = "adopted"    // a run of the last daemon is attached to
	Shutdown  = "shutdown"   // idle runs are being closed

	TaskDue  = "task-due"  // the queue has a task that is due, the store knows nothing of it
	TaskDone = "task-done" // the run of a task is settled
)

// Points lists those that a message comes by.
var Points = []string{
	Stored, BeforeAck, Claimed, Created, Started, Prompted, Input, Printed, Consumed, Committed, Requested, TurnEnded, Sent, Exited, Adopted, Shutdown,
}

// TaskPoints lists those that a task comes by, in that order.
var TaskPoints = []string{
	TaskDue, Claimed, Created, Started, Prompted, Printed, Committed, TurnEnded, Sent, Exited, TaskDone,
}
