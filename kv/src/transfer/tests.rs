use super::*;

#[test]
fn a_frame_survives_the_wire_and_a_damaged_one_does_not() {
    let frame =
        Frame { first_layer: 2, n_layers: 3, blocks: vec![7, 9], payload: Bytes::from_static(b"abcdef") };
    let wire = to_wire(0, frame.clone());
    assert_eq!(from_wire(wire.clone()), Ok(frame));
    let damaged = v1::KvFrame { payload: Bytes::from_static(b"abcdeF"), ..wire.clone() };
    assert_eq!(from_wire(damaged), Err("the checksum does not match"));
    let huge = v1::KvFrame { payload: vec![0; proto::MAX_FRAME_BYTES + 1].into(), ..wire };
    assert!(from_wire(huge).is_err());
}
