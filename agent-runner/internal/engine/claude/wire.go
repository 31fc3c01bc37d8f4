package claude

import (
	"encoding/json"
	"errors"
	"fmt"
	"strings"
)

// What Claude Code prints, as far as it matters here. The keys of an object come
// in any order, and fields are added with every release.

// controlRequest is a question to us.
type controlRequest struct {
	ID      string
	Subtype string
	Input   json.RawMessage // of the tool that it wants to use
}

// controlResponse is the answer to a request of ours.
type controlResponse struct{ ID string }

// lifecycle says what became of a message that was given an id.
type lifecycle struct {
	Message string `json:"command_uuid"`
	State   string `json:"state"` // queued, started, completed, cancelled
}

// result is the end of a turn of Claude Code's own.
type result struct {
	Subtype string   `json:"subtype"`
	IsError bool     `json:"is_error"`
	Result  string   `json:"result"`
	Errors  []string `json:"errors"`
	Reason  string   `json:"terminal_reason"`
	Session string   `json:"session_id"`
	Cost    float64  `json:"total_cost_usd"` // of the session
	Usage   struct {
		Input      int64 `json:"input_tokens"`
		Output     int64 `json:"output_tokens"`
		CacheRead  int64 `json:"cache_read_input_tokens"`
		CacheWrite int64 `json:"cache_creation_input_tokens"`
	} `json:"usage"`
}

func (r result) failed() bool { return r.IsError || r.Subtype != "success" }

// said is what it says about a failure.
func (r *result) said() string {
	for _, text := range []string{r.Result, strings.Join(r.Errors, "; "), r.Reason, r.Subtype} {
		if text != "" {
			return text
		}
	}
	return "no reason given"
}

// sign is a sign of life of the model or of a tool.
type sign struct{}

// decode reads a line. What does not matter is nil.
func decode(line []byte) (any, error) {
	var head struct {
		Type     string `json:"type"`
		Subtype  string `json:"subtype"`
		IsReplay bool   `json:"isReplay"`
	}
	if err := json.Unmarshal(line, &head); err != nil {
		return nil, fmt.Errorf("not an event: %w", err)
	}
	switch head.Type {
	case "":
		return nil, errors.New("not an event: it has no type")
	case "control_request":
		var v struct {
			ID      string `json:"request_id"`
			Request struct {
				Subtype string          `json:"subtype"`
				Input   json.RawMessage `json:"input"`
			} `json:"request"`
		}
		if err := json.Unmarshal(line, &v); err != nil {
			return nil, fmt.Errorf("not a request: %w", err)
		}
		return controlRequest{v.ID, v.Request.Subtype, v.Request.Input}, nil
	case "control_response":
		var v struct {
			Response struct {
				ID string `json:"request_id"`
			} `json:"response"`
		}
		if err := json.Unmarshal(line, &v); err != nil {
			return nil, fmt.Errorf("not a response: %w", err)
		}
		return controlResponse{v.Response.ID}, nil
	case "command_lifecycle":
		var v lifecycle
		if err := json.Unmarshal(line, &v); err != nil {
			return nil, fmt.Errorf("not an event: %w", err)
		}
		return v, nil
	case "result":
		var v result
		if err := json.Unmarshal(line, &v); err != nil {
			return nil, fmt.Errorf("not a result: %w", err)
		}
		return v, nil
	case "user":
		if head.IsReplay {
			return nil, nil
		}
		return sign{}, nil
	case "stream_event", "assistant", "tool_progress":
		return sign{}, nil
	case "system":
		if head.Subtype == "api_retry" {
			return sign{}, nil
		}
	}
	return nil, nil
}
