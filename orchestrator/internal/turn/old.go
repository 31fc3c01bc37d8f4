package turn

import (
	"fmt"

	"berth/orchestrator/internal/berth"
)

// textCost is what an answer costs the store besides its text, in bytes.
const textCost = 1 << 10

// tooMuch ends the run of an older runner whose answers are more than is kept of a
// run's output, and reports whether they are. With no nonce, any tool in the
// container can print what counts as an answer.
func (l *loop) tooMuch(p berth.Progress) bool {
	if len(p.Out) == 0 {
		return false
	}
	if l.said += int64(len(p.Summary) + textCost); l.said <= l.MaxOutput {
		return false
	}
	l.fail(&failure{text: fmt.Sprintf("the image's own runner answered more than %d bytes in one run (CONTAINER_MAX_OUTPUT_SIZE)", l.MaxOutput)})
	if l.run.State != berth.RunStopping {
		l.stop()
	}
	return true
}
